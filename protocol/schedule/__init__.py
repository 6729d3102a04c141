"""Schedules: their form, their text, their invariants, and the policies that order them."""
