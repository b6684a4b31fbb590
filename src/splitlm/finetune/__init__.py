"""Fine-tuning: objectives, data, owners, workers, rounds."""
