"""The Jinja2 template of a report, as a string because a FAB contains only Python and text."""

STYLE = """
:root { --ink: #1d2329; --soft: #5b6670; --line: #dfe3e7; --accent: #1f5f99; --paper: #fff; --bad: #8c1d18; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6eaed; --soft: #a4aeb7; --line: #3a434b;
  --accent: #7fb6e8; --paper: #15191d; --bad: #ff9d94; color-scheme: dark; }
  figure img { background: #fff; padding: .4rem; border-radius: .3rem; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; font-weight: 650; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.6rem 0 .6rem; padding-top: .9rem;
  border-top: 1px solid var(--line); }
.facts { color: var(--soft); margin: 0 0 1.5rem; }
.verdict { font-size: 1.12rem; border-left: 4px solid var(--accent); padding: .15rem 0 .15rem 1rem; margin: 1.4rem 0; }
.verdict p { margin: .35rem 0; font-size: 1rem; } .verdict p:first-child { font-size: 1.2rem; font-weight: 650; }
.warning { color: var(--bad); }
nav { font-size: .88rem; line-height: 1.9; margin: 1.2rem 0; } a { color: var(--accent); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .32rem 1.2rem .32rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); font-size: .86rem; vertical-align: bottom; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.first tbody tr:first-child td { font-weight: 650; }
td.text { overflow-wrap: anywhere; } .wide td:first-child { white-space: nowrap; }
.wide { overflow-x: auto; } .wide:not(.mono) td:not(.text) { white-space: nowrap; }
.note, figcaption { color: var(--soft); font-size: .88rem; max-width: 46rem; }
figure { margin: 1rem 0 1.4rem; }
figure img { max-width: 100%; height: auto; display: block; }
.broad { overflow-x: auto; } .broad img { max-width: max(100%, 42rem); }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--accent); }
code, .mono td { font-size: .86rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.mono td { text-align: left; padding-top: .12rem; padding-bottom: .12rem; overflow-wrap: anywhere; }
@media screen and (max-width: 34rem) { main { padding: 1.4rem .9rem 3rem; } td { font-size: .9rem; }
  th, td { padding-right: .7rem; } .wide td:last-child { white-space: normal !important; } }
@media print { main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
  body { font-size: 11pt; } nav { display: none; } .broad img { max-width: 100%; } }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title><style>{{ style }}</style></head><body><main>
<h1>{{ title }}</h1>
<p class="facts">{{ facts }}</p>
<div class="verdict">{% for sentence in opening %}<p>{{ sentence }}</p>{% endfor %}</div>
{%- if metrics.failures %}
<p class="warning">{{ failed }}</p>
{%- endif %}
{%- if opening | length > 1 %}
<div class="wide first">{{ table(*headline) }}</div>
<p class="note">{{ note }}</p>
{% endif %}
{% if differences[1] %}<div class="wide">{{ table(*differences) }}</div>
<p class="note">NLL of the federated run minus that of the baseline: federated is better below zero.</p>{% endif %}
<nav></nav>

{% if predictions %}<h2>Predictions on held-out rows</h2>
{% for panel in predictions %}{{ panel.render(plots) }}{% endfor %}{% endif %}
{% if notes %}<h2>Notes</h2><ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}
{% for panel in extra %}<h2>{{ panel.title }}</h2>{{ panel.render(plots) }}{% endfor %}
{% if calibration %}<h2>Calibration</h2>{{ calibration.render(plots) }}{% endif %}
{% if convergence %}<h2>Convergence</h2>{{ convergence.render(plots) }}{% endif %}

{% if site_table[1] %}<h2>Sites</h2>
{% if sites %}{{ sites.render(plots) }}{% endif %}
<details{% if site_table[1] | length <= 30 %} open{% endif %}><summary>Figures of each site</summary>
<div class="wide">{{ table(*site_table) }}</div></details>{% endif %}

{% if metrics.data %}<h2>Data</h2><p>{{ agreement.overview_lines(metrics.data) | join("; ") | replace("`", "") }}.</p>
<details><summary>Columns</summary>
<div class="wide">{{ table(agreement.OVERVIEW_TITLES, agreement.overview_rows(metrics.data)) }}</div></details>
{% endif %}

<h2>Communication and time</h2>
{% if cost %}{{ cost.render(plots) }}{% endif %}
<table><tbody>{% for name, value in totals %}<tr><td>{{ name }}</td><td class="text">{{ value }}</td></tr>{% endfor %}
</tbody></table>

<h2>Failures and numerical repairs</h2>{% set failure_limit = 100 %}
{% if metrics.failures %}<div class="wide"><table><thead><tr><th>round</th><th class="text">site</th>
<th class="text">reason</th></tr></thead><tbody>
{%- for row in metrics.failures[:failure_limit] %}<tr><td>{{ row.round }}</td>
<td class="text">{{ metrics.labels.get(row.site, row.site) }}</td>
<td class="text">{{ row.reason }}</td></tr>{% endfor %}</tbody></table></div>
{%- if metrics.failures | length > failure_limit %}
<p class="note">The first {{ failure_limit }} of {{ metrics.failures | length }} failures; all are in metrics.json.</p>
{%- endif %}{% else %}<p>No site failed.</p>{% endif %}
{% if metrics.repairs %}{{ table(["numerical repair", "times"], metrics.repairs | dictsort) }}
{% else %}<p>No numerical repair was needed.</p>{% endif %}

{% if run.saved %}<h2>Saved posterior</h2><p><code>{{ run.saved.equation }}</code></p>
<details><summary>Its arrays</summary><div class="wide mono"><table><tbody>
{%- for name, array in run.saved.arrays.items() %}<tr><td>{{ name }}</td><td>{{ array.shape | join(" × ") }}</td>
<td>{{ run.saved.coordinates[name] }}</td><td>{{ run.saved.meanings[name] }}</td></tr>{% endfor %}
</tbody></table></div></details>{% endif %}

<h2>Configuration</h2>
<details><summary>{{ run.config | length }} resolved keys</summary>
<div class="mono">{{ table([], run.config.items()) }}</div></details>
</main></body></html>
"""
