"""The pure step and its parts; only `loop` composes, and only it has a clock."""
