"""Amazon SageMaker: a training job made from the config file."""
