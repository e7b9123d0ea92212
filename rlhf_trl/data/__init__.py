"""Where examples come from: reasoning-gym tasks, files and the hub, steps, answers in texts.

What cannot be one is an `InputError`, which names the file and row, or the key.
"""
