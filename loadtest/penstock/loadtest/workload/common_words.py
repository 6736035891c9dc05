"""Words for prompts whose tokens nobody here can count."""

from __future__ import annotations

_TEXT = """
    the of and to in is was for that on with he it as at his by be from have had are not this but were her she you
    they all one there been would their when who will more no if out so what up said about than them can only other time
    new some could these two may first then do any my now such like our over man me even most made after also did many
    off before must well back through years where much your way down should because long each just those people too good
    very still own see work life get here between both being under never day same another know while last might us great
    old year come since against go came right used take three small large part place found every house world high set
    end put need keep turn hand home side water room night point number group always order means word line young fact
    area power light city name few head kind thing things half best far given early white open next free state look find
    children women country system question during without again around however form
"""

COMMON = tuple(_TEXT.split())
"""Frequent enough in English that the vocabularies of most models have each as one token."""
