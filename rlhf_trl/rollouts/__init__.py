"""Where models answer prompts outside TRL's own rollouts."""
