//! Who a client is: signed tokens and API keys.
//!
//! What a token is checked by is decided by us and never by the token: an algorithm that was not configured is refused
//! before anything else is looked at, a secret is only ever used for HS256, and a public key only for the one algorithm that
//! its own type stands for. Addresses of keys in a token are not followed.

use std::{
    cell::RefCell,
    fs,
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
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    config::gateway::{ApiKey, AuthSettings, JwtSettings},
    gateway::listen::Identity,
    report::plain,
};

/// A longer token is refused unread.
const TOKEN_MAX: usize = 16 * 1024;
/// Tokens that were good lately, so that a signature is checked once and not for each call. At the bound all are
/// forgotten, and checked again as they come.
const KNOWN_MAX: usize = 1_024;
/// The largest key set.
const JWKS_MAX: u64 = 1 << 20;
const KEYS_MAX: usize = 100;
/// An RSA key that is shorter is no longer good enough to sign with.
const RSA_BITS_MIN: usize = 2_048;
/// The longest name, in bytes. A token with a longer one is refused: two clients must not become one.
const NAME_MAX: usize = 255;

/// Decides who is there.
pub struct Auth {
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

/// One key of a set, for the one algorithm that it is good for.
pub struct PublicKey {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

struct Known {
    who: Who,
    /// In seconds since 1970; with the leeway in it.
    until: u64,
}

impl Known {
    fn identity(&self) -> Identity {
        let until = UNIX_EPOCH.checked_add(Duration::from_secs(self.until.saturating_add(1)));
        Identity { who: self.who.clone(), until }
    }
}

/// Nobody we know. The words are for the client, and tell it nothing that a stranger should not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unauthorized {
    /// It did not say who it is.
    Missing,
    Invalid(&'static str),
}

impl Unauthorized {
    pub fn words(&self) -> &'static str {
        match self {
            Unauthorized::Missing => "a token or an API key is wanted",
            Unauthorized::Invalid(why) => why,
        }
    }

    /// For the header `WWW-Authenticate` of the answer 401.
    pub fn challenge(&self) -> String {
        match self {
            Unauthorized::Missing => "Bearer".to_owned(),
            Unauthorized::Invalid(why) => format!("Bearer error=\"invalid_token\", error_description=\"{why}\""),
        }
    }
}

impl Auth {
    /// Reads the key set. The error is a sentence.
    pub fn load(settings: AuthSettings) -> Result<Auth, String> {
        let jwt = settings.jwt.clone().map(Jwt::load).transpose()?;
        if jwt.is_none() && settings.keys.is_empty() {
            return Err("there is neither a way to check tokens nor an API key, so nobody could connect".to_owned());
        }
        Ok(Auth { jwt, keys: settings.keys.clone(), settings, known: RefCell::default() })
    }

    pub fn who(&self, headers: &HeaderMap) -> Result<Who, Unauthorized> {
        Ok(self.identify(headers)?.who)
    }

    pub fn identify(&self, headers: &HeaderMap) -> Result<Identity, Unauthorized> {
        let token = token(headers)?;
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(key) = self.key(&hash) {
            let role = self.role(key.role.clone());
            return Ok(Who { name: key.name.clone(), role, profile: key.profile.clone() }.into());
        }
        let Some(jwt) = &self.jwt else { return Err(Unauthorized::Invalid("the API key is not known")) };
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

    /// Every key is looked at to the end, so that time tells nothing about how near a guess was.
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

    /// Where there are roles, nobody is without one: no name is the role that may do nothing.
    fn role(&self, said: Option<String>) -> Option<String> {
        let role = said.or_else(|| self.settings.default_role.clone());
        role.or_else(|| self.settings.wants_role.then(String::new))
    }

    fn of_claims(&self, jwt: &Jwt, claims: &Value) -> Result<(Who, u64), Unauthorized> {
        let settings = &jwt.settings;
        let name = claim(claims, &settings.name_claim).and_then(Value::as_str).filter(|name| !name.is_empty());
        let Some(name) = name else { return Err(Unauthorized::Invalid("the token does not say whose it is")) };
        if name.len() > NAME_MAX {
            return Err(Unauthorized::Invalid("the name in the token is too long"));
        }
        let role = match claim(claims, &settings.role_claim) {
            Some(Value::String(role)) => Some(role.clone()),
            Some(Value::Array(roles)) => {
                let mut roles = roles.iter().filter_map(Value::as_str);
                let is_known = |role: &&str| self.settings.roles.contains(*role);
                // A list of roles none of which we know is not the same as no role at all.
                roles.clone().find(is_known).or_else(|| roles.next()).map(str::to_owned)
            }
            _ => None,
        };
        let profile = match settings.profile_claim.as_ref().and_then(|name| claim(claims, name)) {
            None | Some(Value::Null) => None,
            Some(Value::String(profile)) if self.settings.profiles.contains(profile) => Some(profile.clone()),
            Some(_) => return Err(Unauthorized::Invalid("the token names a profile that does not exist")),
        };
        // Checked to be there by the signature's check.
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

/// A claim by its name; where there is none of that name, `a.b` is `b` within `a`.
fn claim<'a>(claims: &'a Value, name: &str) -> Option<&'a Value> {
    claims.get(name).or_else(|| name.split('.').try_fold(claims, |claims, part| claims.get(part)))
}

impl Jwt {
    fn load(settings: JwtSettings) -> Result<Jwt, String> {
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

    /// The claims of a token that is good.
    fn check(&self, token: &str) -> Result<Value, Unauthorized> {
        // `none`, and whatever else we do not know, is no algorithm to the reader of headers.
        let header =
            decode_header(token).map_err(|_| Unauthorized::Invalid("the token is not one that is accepted"))?;
        if !self.algorithms.contains(&header.alg) {
            return Err(Unauthorized::Invalid("the token is signed by an algorithm that is not accepted"));
        }
        if header.crit.is_some() {
            return Err(Unauthorized::Invalid("the token wants something that is not supported"));
        }
        let key = match header.alg {
            Algorithm::HS256 => self.secret.as_ref(),
            algorithm => self.public_key(algorithm, header.kid.as_deref()),
        };
        let key = key.ok_or(Unauthorized::Invalid("the token is signed by a key that is not known"))?;
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
                ErrorKind::ImmatureSignature => "the token is not good yet",
                ErrorKind::InvalidIssuer => "the token is by another issuer",
                ErrorKind::InvalidAudience => "the token is meant for somebody else",
                ErrorKind::InvalidSignature => "the token's signature is wrong",
                ErrorKind::MissingRequiredClaim(claim) if claim == "exp" => "the token never expires",
                ErrorKind::MissingRequiredClaim(claim) if claim == "iss" => "the token is by another issuer",
                ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => "the token is meant for somebody else",
                _ => "the token cannot be read",
            })
        })?;
        // The library accepts a list of issuers if one of them fits; a token has one issuer.
        if data.claims.get("iss").is_some_and(|issuer| !issuer.is_string()) {
            return Err(Unauthorized::Invalid("the token is by another issuer"));
        }
        Ok(data.claims)
    }

    /// By its id. A token without one is tried by the only key there is for its algorithm.
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

/// The keys of a set that are good for RS256 or ES256; others are passed over. The error is the cause, in a few words.
pub fn read_keys(path: &Path) -> Result<Vec<PublicKey>, String> {
    let about = fs::metadata(path).map_err(|error| plain(&error.to_string()))?;
    if about.len() > JWKS_MAX {
        return Err(format!("it is larger than {} MiB", JWKS_MAX >> 20));
    }
    let text = fs::read(path).map_err(|error| plain(&error.to_string()))?;
    let set: JwkSet = serde_json::from_slice(&text).map_err(|error| format!("it is no JWK set ({error})"))?;
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
        let key = DecodingKey::from_jwk(jwk).map_err(|error| format!("its key `{name}` is none ({error})"))?;
        keys.push(PublicKey { id, algorithm, key });
    }
    if keys.is_empty() {
        return Err("there is no key for RS256 or ES256 in it".to_owned());
    }
    Ok(keys)
}

/// What a key is good for, by its own type; none if it is for something else.
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
