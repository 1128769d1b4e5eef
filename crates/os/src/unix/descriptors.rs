//! The limit of open files and sockets.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit to `wanted`, as far as the hard limit allows, and returns the new limit. Children keep the
/// original limit: the keeper, which was forked before, starts them.
pub fn room_for_descriptors(wanted: u64) -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return wanted };
    let more = wanted.min(hard);
    if soft < more && setrlimit(Resource::RLIMIT_NOFILE, more, hard).is_ok() { more } else { soft }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_limit_is_raised_to_the_request_or_the_hard_limit() {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(room_for_descriptors(1), soft, "what is there is never lowered");
        let wanted = soft.saturating_add(1);
        let room = room_for_descriptors(wanted);
        assert!(room == wanted || (room == soft && soft == hard), "{room} of {wanted}");
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap().0, room);
    }
}
