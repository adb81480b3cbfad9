// Package observe documents the observers of this module, for fencelock.Options.Observer:
//
//	observe/logs   slog records
//	observe/prom   Prometheus metrics
//	observe/otel   OpenTelemetry spans and metrics
//
// fencelock.Observers combines them:
//
//	metrics, err := prom.New(prometheus.DefaultRegisterer, nil)
//	...
//	locks, err := fencelock.ForEfficiency(driver, &fencelock.Options{
//		Observer: fencelock.Observers(logs.New(nil), metrics),
//	})
//
// docs/OBSERVABILITY.md lists the metrics, the spans and the records.
package observe
