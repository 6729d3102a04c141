"""Who holds what: which machines form which stage, in what order, in which role, with how many layers."""
