"""The processes of Unison and the commands that prepare their ground; joins `unison.engine` and `unison.ipc`."""
