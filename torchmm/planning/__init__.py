"""From a recipe to sizes, stage layouts and plans, without process groups."""
