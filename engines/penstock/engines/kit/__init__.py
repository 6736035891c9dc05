"""The parts that runners share: the frame of a step, the table of live requests, sampling, grammars, draft models,
sizes, and checks of packages."""
