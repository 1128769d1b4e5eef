//! Authenticates clients by signed tokens and API keys.
//!
//! The configuration decides how a token is checked, never the token: an algorithm that was not configured is refused
//! first, a secret is used only for HS256, and a public key only for the one algorithm of its type. Key addresses in a
//! token are not followed.

mod signatures;

use std::{
    cell::RefCell,
    io,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hyper::{HeaderMap, header::AUTHORIZATION};
use jsonwebtoken::{
    Algorithm, DecodingKey, Validation, decode, decode_header,
    errors::ErrorKind,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, PublicKeyUse},
};
use outlast_core::gateway::Who;
use outlast_os as os;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    cli::report::plain,
    config::gateway::{ApiKey, AuthSettings, JwtSettings},
    gateway::listen::Identity,
};

/// A longer token is refused without being read.
const TOKEN_MAX: usize = 16 * 1024;
/// Cache of valid tokens, so that a signature is checked once and not for each call. At the limit the cache is cleared.
const KNOWN_MAX: usize = 1_024;
/// The largest key set.
const JWKS_MAX: u64 = 1 << 20;
const KEYS_MAX: usize = 100;
/// A shorter RSA key is too weak.
const RSA_BITS_MIN: usize = 2_048;
/// The longest name, in bytes. A token with a longer one is refused: a cut name could be that of another client.
const NAME_MAX: usize = 255;

/// Checks the credentials of clients.
pub(crate) struct Auth {
    jwt: Option<Jwt>,
    keys: Vec<ApiKey>,
    settings: AuthSettings,
    known: RefCell<rustc_hash::FxHashMap<[u8; 32], Known>>,
}

struct Jwt {
    settings: JwtSettings,
    secret: Option<DecodingKey>,
    keys: Vec<PublicKey>,
    algorithms: Vec<Algorithm>,
}

/// One key of a set, for the one algorithm of its type.
pub(crate) struct PublicKey {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

struct Known {
    who: Who,
    /// In seconds since 1970, including the leeway.
    until: u64,
}

impl Known {
    fn identity(&self) -> Identity {
        let until = UNIX_EPOCH.checked_add(Duration::from_secs(self.until.saturating_add(1)));
        Identity { who: self.who.clone(), until }
    }
}

/// The credentials were refused. The text is for the client and contains no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unauthorized {
    /// There are no credentials.
    Missing,
    Invalid(&'static str),
}

impl Unauthorized {
    pub(crate) fn words(&self) -> &'static str {
        match self {
            Unauthorized::Missing => "a token or an API key is required",
            Unauthorized::Invalid(why) => why,
        }
    }

    /// For the header `WWW-Authenticate` of the answer 401.
    pub(crate) fn challenge(&self) -> String {
        match self {
            Unauthorized::Missing => "Bearer".to_owned(),
            Unauthorized::Invalid(why) => format!("Bearer error=\"invalid_token\", error_description=\"{why}\""),
        }
    }
}

impl Auth {
    /// Reads the key set. The error is a sentence.
    pub(crate) fn load(settings: AuthSettings) -> Result<Auth, String> {
        let jwt = settings.jwt.clone().map(Jwt::load).transpose()?;
        if jwt.is_none() && settings.keys.is_empty() {
            return Err("there is neither a key to verify tokens nor an API key, so no client could connect".to_owned());
        }
        Ok(Auth { jwt, keys: settings.keys.clone(), settings, known: RefCell::default() })
    }

    pub(crate) fn identify(&self, headers: &HeaderMap) -> Result<Identity, Unauthorized> {
        let token = token(headers)?;
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(key) = self.key(&hash) {
            let role = self.role(key.role.clone());
            return Ok(Who { name: key.name.clone(), role, profile: key.profile.clone() }.into());
        }
        let Some(jwt) = &self.jwt else { return Err(Unauthorized::Invalid("the API key is unknown")) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut known = self.known.borrow_mut();
        match known.get(&hash) {
            Some(found) if now <= found.until => return Ok(found.identity()),
            Some(_) => {
                known.remove(&hash);
                return Err(Unauthorized::Invalid("the token has expired"));
            }
            None => {}
        }
        let (who, until) = self.of_claims(jwt, &jwt.check(token)?)?;
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        let found = Known { who, until };
        let identity = found.identity();
        known.insert(hash, found);
        Ok(identity)
    }

    /// Compares with every key to the end, so that the time reveals nothing about a guess.
    fn key(&self, hash: &[u8; 32]) -> Option<&ApiKey> {
        let mut found = None;
        for key in &self.keys {
            let difference = key.sha256.iter().zip(hash).fold(0, |sum, (one, other)| sum | (one ^ other));
            if std::hint::black_box(difference) == 0 {
                found = Some(key);
            }
        }
        found
    }

    /// If roles are configured, a client without one gets the empty name, a role without rights.
    fn role(&self, said: Option<String>) -> Option<String> {
        let role = said.or_else(|| self.settings.default_role.clone());
        role.or_else(|| self.settings.wants_role.then(String::new))
    }

    fn of_claims(&self, jwt: &Jwt, claims: &Value) -> Result<(Who, u64), Unauthorized> {
        let settings = &jwt.settings;
        let name = claim(claims, &settings.name_claim).and_then(Value::as_str).filter(|name| !name.is_empty());
        let Some(name) = name else { return Err(Unauthorized::Invalid("the token has no client name")) };
        if name.len() > NAME_MAX {
            return Err(Unauthorized::Invalid("the name in the token is too long"));
        }
        let role = match claim(claims, &settings.role_claim) {
            Some(Value::String(role)) => Some(role.clone()),
            Some(Value::Array(roles)) => {
                let mut roles = roles.iter().filter_map(Value::as_str);
                let is_known = |role: &&str| self.settings.roles.contains(*role);
                // A list of roles that are all unknown is not the same as no role.
                roles.clone().find(is_known).or_else(|| roles.next()).map(str::to_owned)
            }
            _ => None,
        };
        let profile = match settings.profile_claim.as_ref().and_then(|name| claim(claims, name)) {
            None | Some(Value::Null) => None,
            Some(Value::String(profile)) if self.settings.profiles.contains(profile) => Some(profile.clone()),
            Some(_) => return Err(Unauthorized::Invalid("the token names a profile that does not exist")),
        };
        // The signature check requires it.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of a second")]
        let expires = claims["exp"].as_u64().or_else(|| claims["exp"].as_f64().map(|exp| exp as u64)).unwrap_or(0);
        let until = expires.saturating_add(settings.leeway.as_secs());
        let name = name.to_owned();
        Ok((Who { name, role: self.role(role), profile }, until))
    }
}

/// `Authorization: Bearer …` or `X-API-Key: …`, once.
fn token(headers: &HeaderMap) -> Result<&str, Unauthorized> {
    let mut authorizations = headers.get_all(AUTHORIZATION).iter();
    let mut keys = headers.get_all("x-api-key").iter();
    let value = match (authorizations.next(), keys.next(), authorizations.next().or(keys.next())) {
        (None, None, _) => return Err(Unauthorized::Missing),
        (Some(_), Some(_), _) | (_, _, Some(_)) => {
            return Err(Unauthorized::Invalid("more than one token is given"));
        }
        (None, Some(key), None) => key.to_str().ok(),
        (Some(value), None, None) => {
            let Some((scheme, token)) = value.to_str().ok().and_then(|value| value.split_once(' ')) else {
                return Err(Unauthorized::Invalid("the header Authorization is not `Bearer` and a token"));
            };
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Err(Unauthorized::Invalid("the header Authorization is not `Bearer` and a token"));
            }
            Some(token)
        }
    };
    match value.map(str::trim) {
        Some(token) if (1..=TOKEN_MAX).contains(&token.len()) => Ok(token),
        Some("") => Err(Unauthorized::Missing),
        _ => Err(Unauthorized::Invalid("the token cannot be read")),
    }
}

/// A claim by its name; without such a claim, `a.b` is `b` within `a`.
fn claim<'a>(claims: &'a Value, name: &str) -> Option<&'a Value> {
    claims.get(name).or_else(|| name.split('.').try_fold(claims, |claims, part| claims.get(part)))
}

impl Jwt {
    fn load(settings: JwtSettings) -> Result<Jwt, String> {
        signatures::install();
        let secret = match &settings.secret {
            Some(secret) if secret.0.is_empty() => return Err("the secret for tokens is empty".to_owned()),
            Some(secret) => Some(DecodingKey::from_secret(&secret.0)),
            None => None,
        };
        let keys = match &settings.jwks {
            Some(path) => {
                read_keys(path).map_err(|why| format!("the key set `{}` cannot be used: {why}", path.display()))?
            }
            None => vec![],
        };
        let algorithms = settings.algorithms.iter().filter_map(|name| match name.as_str() {
            "HS256" => Some(Algorithm::HS256),
            "RS256" => Some(Algorithm::RS256),
            "ES256" => Some(Algorithm::ES256),
            _ => None,
        });
        Ok(Jwt { algorithms: algorithms.collect(), secret, keys, settings })
    }

    /// The claims of a valid token.
    fn check(&self, token: &str) -> Result<Value, Unauthorized> {
        // The header parser refuses `none` and unknown algorithms.
        let header = decode_header(token).map_err(|_| Unauthorized::Invalid("the token is not accepted"))?;
        if !self.algorithms.contains(&header.alg) {
            return Err(Unauthorized::Invalid("the token is signed by an algorithm that is not accepted"));
        }
        if header.crit.is_some() {
            return Err(Unauthorized::Invalid("the token needs an extension that is not supported"));
        }
        let key = match header.alg {
            Algorithm::HS256 => self.secret.as_ref(),
            algorithm => self.public_key(algorithm, header.kid.as_deref()),
        };
        let key = key.ok_or(Unauthorized::Invalid("the token is signed by an unknown key"))?;
        let mut validation = Validation::new(header.alg);
        validation.leeway = self.settings.leeway.as_secs();
        validation.validate_exp = true;
        validation.validate_nbf = true;
        let mut required = vec!["exp"];
        if let Some(issuer) = &self.settings.issuer {
            validation.set_issuer(&[issuer]);
            required.push("iss");
        }
        validation.validate_aud = !self.settings.audience.is_empty();
        if validation.validate_aud {
            validation.set_audience(&self.settings.audience);
            required.push("aud");
        }
        validation.set_required_spec_claims(&required);
        let data = decode::<Value>(token, key, &validation).map_err(|error| {
            Unauthorized::Invalid(match error.kind() {
                ErrorKind::ExpiredSignature => "the token has expired",
                ErrorKind::ImmatureSignature => "the token is not valid yet",
                ErrorKind::InvalidIssuer => "the token is from another issuer",
                ErrorKind::InvalidAudience => "the token is for another audience",
                ErrorKind::InvalidSignature => "the token's signature is wrong",
                ErrorKind::MissingRequiredClaim(claim) if claim == "exp" => "the token has no expiry time",
                ErrorKind::MissingRequiredClaim(claim) if claim == "iss" => "the token is from another issuer",
                ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => "the token is for another audience",
                _ => "the token cannot be read",
            })
        })?;
        // The library accepts a list of issuers if one of them fits; a token has one issuer.
        if data.claims.get("iss").is_some_and(|issuer| !issuer.is_string()) {
            return Err(Unauthorized::Invalid("the token is from another issuer"));
        }
        Ok(data.claims)
    }

    /// By its id. A token without an id is checked with the only key for its algorithm.
    fn public_key(&self, algorithm: Algorithm, id: Option<&str>) -> Option<&DecodingKey> {
        let mut fitting = self.keys.iter().filter(|key| key.algorithm == algorithm);
        match id {
            Some(id) => fitting.find(|key| key.id.as_deref() == Some(id)).map(|key| &key.key),
            None => match (fitting.next(), fitting.next()) {
                (Some(only), None) => Some(&only.key),
                _ => None,
            },
        }
    }
}

/// The keys of a set for RS256 or ES256; others are skipped. The error is the cause, in a few words.
pub(crate) fn read_keys(path: &Path) -> Result<Vec<PublicKey>, String> {
    let text = os::read_named(path, JWKS_MAX).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => format!("it is larger than {} MiB", JWKS_MAX >> 20),
        _ => plain(&error.to_string()),
    })?;
    let set: JwkSet = serde_json::from_slice(&text).map_err(|error| format!("it is not a JWK set ({error})"))?;
    if set.keys.len() > KEYS_MAX {
        return Err(format!("it has more than {KEYS_MAX} keys"));
    }
    let mut keys: Vec<PublicKey> = Vec::new();
    for jwk in &set.keys {
        let Some(algorithm) = algorithm_of(jwk) else { continue };
        let id = jwk.common.key_id.clone();
        let name = id.clone().unwrap_or_else(|| "without an id".to_owned());
        if let AlgorithmParameters::RSA(rsa) = &jwk.algorithm
            && rsa.n.trim_end_matches('=').len() * 6 < RSA_BITS_MIN
        {
            return Err(format!("its key `{name}` has less than {RSA_BITS_MIN} bits"));
        }
        if keys.iter().any(|known| known.id.is_some() && known.id == id) {
            return Err(format!("it has two keys with the id `{name}`"));
        }
        let key = DecodingKey::from_jwk(jwk).map_err(|error| format!("its key `{name}` is not valid ({error})"))?;
        keys.push(PublicKey { id, algorithm, key });
    }
    if keys.is_empty() {
        return Err("there is no key for RS256 or ES256 in it".to_owned());
    }
    Ok(keys)
}

/// The algorithm of a key, by its type; `None` if it is for another use.
fn algorithm_of(jwk: &Jwk) -> Option<Algorithm> {
    if matches!(&jwk.common.public_key_use, Some(purpose) if *purpose != PublicKeyUse::Signature) {
        return None;
    }
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        _ => return None,
    };
    jwk.common.key_algorithm.is_none_or(|said| said == algorithm.1).then_some(algorithm.0)
}

#[cfg(test)]
mod tests;
