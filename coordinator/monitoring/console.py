"""A page that Prometheus itself serves (a console template): the run at a glance, with nothing else installed.

    prometheus --config.file=prometheus.yml --web.console.templates=consoles

It lies at /consoles/barnraise.html. It uses the template language alone, none of the console libraries, which not
every Prometheus ships; no script.
"""

from __future__ import annotations

from collections.abc import Sequence

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="30">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Barnraise</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; }
td:last-child, th:last-child { text-align: right; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
</style>
</head>
<body>
<h1>Barnraise</h1>
"""
_TAIL = """\
<p>Made by <code>barnraise monitoring write</code>; anew every 30 seconds.</p>
</body>
</html>
"""
_LAST_STEP = "barnraise_run_last_step_timestamp_seconds"
_TABLES: Sequence[tuple[str, Sequence[tuple[str, str, str, str]]]] = (
    (
        "Run",
        (
            ("state: {{ .Labels.state }}", "barnraise_run_state == 1", "", ""),
            ("steps done", "barnraise_run_step + 1", "", "run"),
            ("steps planned", "barnraise_run_target_steps", "", "run"),
            ("loss", 'barnraise_run_loss{split="train"}', 'printf "%.4f"', "run"),
            ("tokens a second", "barnraise:run_tokens:rate5m", "humanize", "run"),
            ("time left", "barnraise:run_remaining_seconds", "humanizeDuration", "run"),
            ("goodput", "barnraise:run_goodput:ratio1h", "humanizePercentage", "run"),
            (
                "since the last step",
                f"time() - ({_LAST_STEP} > 0)",
                "humanizeDuration",
                "run",
            ),
        ),
    ),
    (
        "Pipeline",
        (
            ("stage {{ .Labels.stage }}: volunteers", "sort(barnraise_coordinator_stage_nodes)", "", ""),
            (
                "stage {{ .Labels.stage }}: tasks waiting",
                "sort_desc(barnraise_coordinator_stage_queue_items > 0)",
                "",
                "",
            ),
            ("stage {{ .Labels.stage }}: servers away", 'barnraise_coordinator_stage_places{state="away"} > 0', "", ""),
        ),
    ),
    ("Members", (("{{ .Labels.state }}", "barnraise_coordinator_nodes > 0", "", ""),)),
    (
        "Servers",
        (
            ("{{ .Labels.instance }}: step", "barnraise_server_step", "", ""),
            ("{{ .Labels.instance }}: free disk", "barnraise_server_disk_free_bytes", "humanize1024", ""),
            (
                "{{ .Labels.instance }}: checkpoint age",
                "time() - (barnraise_server_checkpoint_last_success_timestamp_seconds > 0)",
                "humanizeDuration",
                "",
            ),
        ),
    ),
    ("Not answering", (("{{ .Labels.role }} {{ .Labels.instance }}", "up == 0", "", ""),)),
    ("Alerts", (("{{ .Labels.alertname }} ({{ .Labels.severity }})", 'ALERTS{alertstate="firing"}', "", ""),)),
)


def queries() -> list[str]:
    """Every expression of the console."""
    return [expression for _, rows in _TABLES for _, expression, _, _ in rows]


def console() -> str:
    """The template's text."""
    parts = [_HEAD]
    for title, rows in _TABLES:
        parts.append(f"<table>\n<caption>{title}</caption>\n<tbody>\n")
        for name, expression, shown, label in rows:
            quoted = expression.replace("`", "")
            first = f"{{{{ .Labels.{label} }}}}: {name}" if label else name
            value = f"{{{{ .Value | {shown} }}}}" if shown else "{{ .Value }}"
            parts.append(f"{{{{ range query `{quoted}` }}}}<tr><td>{first}</td><td>{value}</td></tr>\n{{{{ end }}}}")
        parts.append("</tbody>\n</table>\n")
    return "".join([*parts, _TAIL])
