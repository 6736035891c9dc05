"""`penstock doctor`: what this machine can serve, and what stands in the way."""

from penstock.gateway.commands.doctor.command import add_doctor_command

__all__ = ["add_doctor_command"]
