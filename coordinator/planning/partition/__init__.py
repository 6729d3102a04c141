"""Which blocks does each stage hold? AutoPipe's planner, with bounds."""
