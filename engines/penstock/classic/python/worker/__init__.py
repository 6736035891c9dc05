"""The part of the python backend that runs in the model's process. Needs Python 3.10 and numpy, and nothing else of
Penstock.
"""
