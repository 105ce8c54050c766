"""Fine-tuning of hybrid state-space language models in JAX; README.md is the map."""
