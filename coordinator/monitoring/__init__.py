"""What an operator's Prometheus and Grafana need: rules, dashboards, a console, the runbook; all made from data."""
