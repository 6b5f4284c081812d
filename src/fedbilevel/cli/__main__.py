from fedbilevel.cli import main

main()
