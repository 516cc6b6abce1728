"""Energon and Lance datasets."""
