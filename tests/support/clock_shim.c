/* Wall clocks of a process that jump: seconds in a shared file are added to what the kernel says.

   Loaded with LD_PRELOAD. The monotonic clock, and the times that the kernel gives to files, stay as they are:
   so it is for a host whose clock is set while its files are on a server. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shared;

__attribute__((constructor)) static void open_offset(void) {
    const char *name = getenv("CLOCK_OFFSET_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    shared = found == MAP_FAILED ? NULL : found;
    if (file >= 0) close(file);
}

static long offset(void) { return shared ? *shared : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed && now) now->tv_sec += offset();
    return failed;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

/* Deadlines on the wall clock were computed with the offset, and the kernel does not know it. Those on the
   monotonic clock are small numbers. */
static struct timespec real(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (found.tv_sec > 1000000000) found.tv_sec -= offset();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec found = real(deadline);
    return next(condition, mutex, &found);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec found = real(deadline);
    return next(semaphore, &found);
}
