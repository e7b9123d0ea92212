"""Where examples come from: reasoning-gym tasks, files and the hub, steps; what an answer says.

What cannot be one is an `InputError`, which names the file and row, or the key.
"""
