"""The files of the live page, as browsers get them: no build step. `coordinator.process.page` serves them.

uplot.js and uplot.css are uPlot 1.6.32 (MIT, uplot-license.txt), as npm's package has them.
"""
