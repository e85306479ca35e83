"""Inspection of data as the model receives them: summary, text and HTML reports."""
