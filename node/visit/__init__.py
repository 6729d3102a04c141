"""What a volunteer learns before it says yes."""
