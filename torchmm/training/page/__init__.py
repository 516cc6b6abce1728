"""index.html of a run, and of several side by side; begin with `pages`.

A page is made from the files of the run directory alone (`contents`, `sections`; `charts.js` and
`style.css` stand in it), so it can be made later, of a run that was killed, too. It needs no server
and no network. Rejected: a dashboard process, which somebody has to start and to reach; trackers do
that better.
"""
