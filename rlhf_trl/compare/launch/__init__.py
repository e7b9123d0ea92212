"""Whether a launch on several processes makes the update of one."""
