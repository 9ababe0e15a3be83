/* Shared declarations of the native library. */
#ifndef SHOAL_H
#define SHOAL_H

#include <stddef.h>
#include <stdint.h>

/* Kernels are compiled once for each instruction set, with its name as SHOAL_VARIANT; their functions
   get it as a suffix: KERNEL(shoal_norm) is shoal_norm_avx2, for example. */
#define SHOAL_JOIN_(name, variant) name##_##variant
#define SHOAL_JOIN(name, variant) SHOAL_JOIN_(name, variant)
#define KERNEL(name) SHOAL_JOIN(name, SHOAL_VARIANT)

typedef void (*shoal_task)(void *context, int64_t index);

/* Call task(context, i) for every i in [0, count), on several threads. One that is free takes the next i, so that
   another whose core is taken away delays no more than the task it has. Where tasks are shared already, as within a
   task, the thread that calls does all. */
void shoal_parallel(int64_t count, shoal_task task, void *context);

/* How many threads share the tasks: as many as torch has for its own. */
int64_t shoal_threads(void);

#endif
