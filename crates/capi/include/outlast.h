/*
 * outlast.h: reach a running outlast from C.
 *
 * Link with -loutlast_client. Everything here is a plain call that blocks until it has an answer, or until its time is
 * over; no thread is started, no signal handler is set, and nothing is printed.
 *
 * Ownership. A client is yours from outlast_connect until you give it to outlast_free. A text that is handed to you
 * through a `char **` is yours until you give it to outlast_free_text. What you hand in stays yours and is not kept.
 *
 * Threads. A client may be used from any thread, and by several: their calls come one after the other. Only
 * outlast_free must be the last to touch it. The words of outlast_last_error belong to the thread that failed.
 *
 * Failures. Every call says what came of it by its outlast_status; nothing else is changed when it is not OUTLAST_OK,
 * but that a `char **` or `outlast_client **` is set to NULL. A bug in the library is OUTLAST_BROKEN, never an abort.
 */
#ifndef OUTLAST_H
#define OUTLAST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this file. A library of another number does not fit it: compare with outlast_api_version(). */
#define OUTLAST_API_VERSION 1

/* What came of a call. New numbers may come; those that are here stay. */
typedef int32_t outlast_status;
#define OUTLAST_OK 0
/* NULL where something is needed, a text that is not UTF-8, a mode there is not, too many bytes. */
#define OUTLAST_BAD_ARGUMENT 1
/* Nothing of that name runs, or several do. */
#define OUTLAST_NOT_FOUND 2
/* The instance is gone, or no process listens on its socket. Connect again. */
#define OUTLAST_UNREACHABLE 3
/* It heard, and would not; outlast_last_code says why in a word. */
#define OUTLAST_REFUSED 4
/* It did not answer in time. What was asked for may still happen. */
#define OUTLAST_TIMED_OUT 5
/* A bug in this library. The client can only be freed. */
#define OUTLAST_BROKEN 6

/* How an agent is started again. */
#define OUTLAST_CONTINUE 0 /* with its conversation */
#define OUTLAST_FRESH 1    /* with a new one */

/* Wait for as long as it takes. */
#define OUTLAST_FOREVER UINT32_MAX

/* A connection to one session, server or gateway. */
typedef struct outlast_client outlast_client;

/* The version of the library that is loaded. */
uint32_t outlast_api_version(void);

/*
 * Connects. `which` is an id as `outlast ps` shows it, the beginning of one, a name, or, if there is a slash in it, the
 * path of a socket. `timeout_ms` is for connecting alone.
 */
outlast_status outlast_connect(const char *which, uint32_t timeout_ms, outlast_client **client);

/* How it is: the JSON object of `outlast state --json`. */
outlast_status outlast_state(outlast_client *client, uint32_t timeout_ms, char **json);

/*
 * Starts it again, and waits until it is there. `mode` is for agents; of a server only OUTLAST_CONTINUE is known.
 * `reason` is for the logs and may be NULL. `json`, which may be NULL, gets {"old_pid", "new_pid", "mode", …}.
 */
outlast_status outlast_restart(
    outlast_client *client, int32_t mode, const char *reason, uint32_t timeout_ms, char **json);

/* Types bytes into the terminal of an agent, as they are. At most 512 KiB; `bytes` may be NULL if `count` is 0. */
outlast_status outlast_inject(outlast_client *client, const uint8_t *bytes, size_t count, uint32_t timeout_ms);

/*
 * Sends a text to an agent: waits up to `timeout_ms` until there is an empty place to type, pastes it there, and, if `submit`
 * is not 0, presses Enter and waits for the agent's record of the turn. Then it is OUTLAST_OK, and `json`, which may be NULL,
 * gets {"result", "submitted", "presses", …}: `result` is "submitted" if the agent recorded the turn, and "unproven" if not. Else
 * the word of outlast_last_code says how far it came. What was typed has up to a minute more, so a call may take as much
 * longer than `timeout_ms`.
 */
outlast_status outlast_send(
    outlast_client *client, const char *text, int32_t submit, uint32_t timeout_ms, char **json);

/* Ends it, politely or (`force` is not 0) at once, and waits until it is gone. The client can then only be freed. */
outlast_status outlast_stop(outlast_client *client, int32_t force, uint32_t timeout_ms);

/*
 * Of the last call of this thread that failed: a sentence or more for people, and, where OUTLAST_REFUSED was the answer,
 * the word for programs. Never NULL. They hold until this thread's next call of any function here but these two.
 */
const char *outlast_last_error(void);
const char *outlast_last_code(void);

/* NULL is fine. Anything else exactly once. */
void outlast_free(outlast_client *client);
void outlast_free_text(char *text);

#ifdef __cplusplus
}
#endif

#endif
