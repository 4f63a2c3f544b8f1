"""A plan at work on a model and its optimizers: what installs hooks, and what runs before and after each step."""
