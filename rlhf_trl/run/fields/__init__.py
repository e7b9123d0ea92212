"""The fields that recipes have beside those of TRL's config and its ModelConfig."""
