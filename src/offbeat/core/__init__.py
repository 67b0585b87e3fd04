"""The core: plans, rules, profiles, verification, simulation and the runtime.

Private; `offbeat` and the files beside this folder hold the promised names.
"""
