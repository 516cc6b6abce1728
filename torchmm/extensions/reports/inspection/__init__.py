"""Report on the data of a recipe before training: findings, plots and a page."""
