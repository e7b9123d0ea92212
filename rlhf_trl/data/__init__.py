"""Where examples come from: reasoning-gym tasks, files and the hub, verifiers, steps."""
