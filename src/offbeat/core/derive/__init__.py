"""Plans and properties that are derived from a plan and from the effects of its rules."""
