"""Tasks, rewards and data sets in the formats that TRL's trainers take."""
