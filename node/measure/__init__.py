"""Measures links, and says what a computer's line and gateway are like."""
