"""Scores of generated answers to held-out questions about images and audio."""
