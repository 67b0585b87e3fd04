"""The core: plans, rules, profiles, verification, simulation and the runtime.

This package is private. The public API is `offbeat` and the modules beside this folder
(`offbeat.plan`, `offbeat.sim`, ...).
"""
