"""What keeps a site's summands from the server: keys of sites, masks that cancel in a total, what a site refuses."""
