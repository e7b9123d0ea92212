"""Where examples come from: reasoning-gym tasks, files and the hub, verifiers, steps.

What cannot be one is an `InputError`, which names the file and row, or the key.
"""
