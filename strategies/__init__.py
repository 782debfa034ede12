"""What a server does: state, pure update, Flower Strategy."""
