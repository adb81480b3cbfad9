package main

// backendTopic is the topic of "fencelock help" about URLs.
const backendTopic = "backend"

const backendHelp = `The URLs of --backend, FENCELOCK_BACKEND and --backend-file:

  fencelock://host[:7480][,host…]                            the bundled server
  redis://[user:password@]host[:6379][/database]             Redis and Valkey
  redis+sentinel://[user:password@]host[:26379][,host…]/master
  redis+cluster://[user:password@]host[:6379][,host…]
  redlock://[user:password@]host[:6379],host,host[/database] several independent Redis servers
  etcd://[user:password@]host[:2379][,host…]
  zk://[user:password@]host[:2181][,host…][/chroot]          ZooKeeper
  postgres://[user[:password]@]host[:5432][,host…]/database

Every URL takes these options, as ?option=value&option=value:

  ca           a file in PEM form: the authorities to trust. This and the next three select TLS
  cert, key    files in PEM form: the client's certificate and its key
  server-name  the name to expect in the servers' certificates
  timeout      the time for the first connection, such as 5s

The schemes fencelocks, rediss, rediss+sentinel, rediss+cluster, redlocks, etcds and zks select TLS, too.
PostgreSQL: one of the four without an sslmode means verify-full. A connection reads files that have been replaced.

  fencelocks://a.example:7480,b.example:7480?ca=/etc/locks/ca.pem&cert=/etc/locks/tls.pem&key=/etc/locks/tls.key

Further options:

  fencelock under                    holds that other processes keep meanwhile: what FENCELOCK_UNDER of "run" has
            credential               a file with a token, read for each connection; it needs TLS
  redis     password-file            a file with the password, read for each connection
            prefix                   what the names of all keys begin with
            pool-size                connections to each server
            protocol                 2 or 3: the version of the Redis protocol
            db                       with Sentinels: the number of the database
            sentinel-username        with Sentinels that ask for credentials of their own
            sentinel-password
            replicas                 how many replicas confirm a write
            replica-timeout          the time that they have for it
            replica-disk             true: they confirm it when it is on disk
            allow-volatile-eviction  true: accept a server that may evict keys with a TTL
            assume-version           the server's version; it is not asked then
            assume-cluster           true, with assume-version: names are on different servers, behind a proxy
  redlock   password-file, prefix, pool-size, protocol, allow-volatile-eviction, assume-version as above, and
            node-timeout             the time that a server has for an answer
            max-ttl                  the longest TTL in use
            trust-fresh              true: use a server that has just started
            wait-for-all             true: wait for the answers of all servers
  etcd      password-file            a file with the password, read for each token
            prefix
  zk        password-file            a file with the password, read once
            prefix                   the node below which all others are
            tick                     tickTime of the servers, such as 2s
  postgres  schema                   of the driver's tables
            no-listen                true: poll, as behind a pooler in transaction mode
            ignore-standbys          names of receivers of the log that are never promoted
            and all that libpq and pgxpool have, such as sslmode, passfile and pool_max_conns
  http      credential               a file with the token that the gateway asks for, read for each request

"acquire", "renew" and "release" also take the URL of a gateway, http://host:7481 or https://host:7481, with the options
ca, cert, key, server-name, timeout and credential. "fencelock token create" makes a token.
`
