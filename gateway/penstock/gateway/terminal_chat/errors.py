class ChatError(Exception):
    """Why there is no answer, in one line for the user."""
