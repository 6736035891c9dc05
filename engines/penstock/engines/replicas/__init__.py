"""Several replicas of a model behind one `Engine`: which of them gets a request, and what happens when one dies."""
