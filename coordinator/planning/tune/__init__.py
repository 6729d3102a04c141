"""Which of all choices suits a run's machines, and why not the others?"""
