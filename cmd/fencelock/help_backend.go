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

  ca           a PEM file with the authorities to trust. This and the next three select TLS
  cert, key    PEM files with the client's certificate and key
  server-name  the expected name in the servers' certificates
  timeout      the maximum time for the first connection, such as 5s

The schemes fencelocks, rediss, rediss+sentinel, rediss+cluster, redlocks, etcds and zks also select TLS. For
PostgreSQL, any of the four options without an sslmode means verify-full. New connections use replaced files.

  fencelocks://a.example:7480,b.example:7480?ca=/etc/locks/ca.pem&cert=/etc/locks/tls.pem&key=/etc/locks/tls.key

Further options:

  fencelock under                    the outer holds of this process, from FENCELOCK_UNDER of "run"
            credential               a file with a token, read for each connection; needs TLS
  redis     password-file            a file with the password, read for each connection
            prefix                   the prefix of all keys
            pool-size                connections to each server
            protocol                 2 or 3: the version of the Redis protocol
            db                       with Sentinels: the number of the database
            sentinel-username        with Sentinels that have separate credentials
            sentinel-password
            sentinel-password-file   a file with that password, read once
            replicas                 the number of replicas that must confirm a write
            replica-timeout          the maximum time for their confirmation
            replica-disk             true: they confirm it after writing it to disk
            allow-volatile-eviction  true: accept a server that may evict keys with a TTL
            assume-version           the server's version, instead of asking the server
            assume-cluster           true, with assume-version: a proxy spreads the keys over several servers
  redlock   password-file, prefix, pool-size, protocol, allow-volatile-eviction, assume-version as above, and
            node-timeout             the maximum time for the reply of a server
            max-ttl                  the longest TTL in use
            trust-fresh              true: use a server that has just started
            wait-for-all             true: wait for the answers of all servers
  etcd      password-file            a file with the password, read for each token
            prefix
  zk        password-file            a file with the password, read once
            prefix                   the parent of all nodes
            tick                     the servers' tickTime, such as 2s
  postgres  schema                   of the driver's tables
            no-listen                true: poll, for poolers in transaction mode
            ignore-standbys          names of WAL receivers that are never promoted
            and all options of libpq and pgxpool, such as sslmode, passfile and pool_max_conns
  http      credential               a file with the token for the gateway, read for each request

"acquire", "renew" and "release" also take the URL of a gateway, http://host:7481 or https://host:7481, with the options
ca, cert, key, server-name, timeout and credential. "fencelock token create" makes a token.
`
