"""What is sent, and when: sessions by seed, for any number of client processes."""

from penstock.loadtest.workload.build import Sessions, build
from penstock.loadtest.workload.mixes import keeps_text

__all__ = ["Sessions", "build", "keeps_text"]
