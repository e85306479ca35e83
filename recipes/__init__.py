"""Recipes: functions that return a full training configuration, read top to bottom."""
