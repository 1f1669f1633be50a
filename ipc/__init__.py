"""How processes talk: the shared vocabulary and, around it, the channels. Imports nothing of Unison's other folders."""
