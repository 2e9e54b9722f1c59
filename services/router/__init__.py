"""The door of the mesh: validates, tokenises, places, streams through, cancels; never touches a tensor."""
