"""What the owner of a lent computer decides, and what follows: limits, consent, pauses with a reason, thanks."""
