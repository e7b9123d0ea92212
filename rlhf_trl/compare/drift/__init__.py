"""What moved in TRL: the recorded surface and sources against the installed ones."""
